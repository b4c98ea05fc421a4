# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled train steps and what can be read off them: memory, traffic, FLOPs, what runs while a transfer is under way."""
