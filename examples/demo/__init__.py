# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.demo`: one model trained with and without a pipeline, and the two loss curves compared."""
