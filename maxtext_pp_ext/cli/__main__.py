# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m maxtext_pp_ext.cli` is `maxtext-pp`."""

import sys

from maxtext_pp_ext.cli import main

if __name__ == "__main__":
  sys.exit(main())
