# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is read off MaxText's configs, models and train steps. Connects nothing: that is the caller's."""
