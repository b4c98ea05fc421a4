# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The only code that knows MaxText's internals. Imports nothing (see `startup`).

`patch points` connects this package with MaxText, `replacements` replaces MaxText's own parts, `rules` refuses configs,
and `models` reads configs, models and train steps. `startup` and `build` are for the .pth file, `activate` is the same
for a checkout. A MaxText that has the patch points itself (`patches/`) finds functions of `replacements` by entry points.
"""
