# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tests with the oldest and the newest versions that setup.cfg allows."""
