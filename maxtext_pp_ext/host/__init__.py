# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The only code that knows MaxText's insides. Imports nothing (see `startup`).

`seams` connects this package with MaxText, `replacements` is what is put in the place of MaxText's own, `rules` refuses
configs, `models` reads configs, models and train steps. What installed files name stays here: `startup` and `build` (the
.pth file), `activate` (the same for a checkout), `official` (the entry points).
"""
