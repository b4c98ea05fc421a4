# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a compiled train step takes on TPUs, projected from the compiler's own estimates: no measurement."""
