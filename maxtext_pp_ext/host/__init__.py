# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The only code that knows MaxText's internals. Imports nothing (see `startup`).

`patch points` connects this package with MaxText, `replacements` replaces MaxText's own parts, `rules` refuses configs,
and `models` reads configs, models and train steps. Installed files name the modules beside these folders: `startup` and
`build` (the .pth file), `activate` (the same for a checkout), `official` (the entry points).
"""
