"""`python -m lit_ppo` is `lit-ppo`."""

import sys

from lit_ppo.cli import main

if __name__ == "__main__":
    sys.exit(main())
