"""`replayssm bench decode`, from a checkout that is not installed: the same options.

Usage: python -m benchmarks.gpu_decode [--batch 1,8,32] [--ring-len 16] --output FILE
"""

import sys

from replayssm.cli import run

if __name__ == "__main__":
    sys.exit(run(["bench", "decode", *sys.argv[1:]]))
