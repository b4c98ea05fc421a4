# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m maxtext_pp_ext.train ARGS` runs MaxText's trainer with this package, with or without the start-up hook.

The arguments are those of `python -m maxtext.trainers.pre_train.train`.
"""

from collections.abc import Sequence
import sys

import maxtext_pp_ext


def main(argv: Sequence[str] | None = None) -> None:
  """Runs MaxText's trainer on `argv` (by default the command line) and exits with its status."""
  maxtext_pp_ext.install()
  from absl import app  # pylint: disable=import-outside-toplevel
  from maxtext.trainers.pre_train import train  # pylint: disable=import-outside-toplevel

  # MaxText derives the default yml file from the script's path.
  app.run(train.main, argv=[train.__file__, *(sys.argv if argv is None else argv)[1:]])


if __name__ == "__main__":
  main()
