"""How much memory a program took."""

import subprocess
import sys

# A process is born as its parent's copy, and the kernel counts that copy among its memory: the parent has to be small.
LAUNCHER = """
import os, sys
silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=silent)
_, status, usage = os.wait4(child, 0)
assert status == 0, sys.argv
print(usage.ru_maxrss << 10)
"""


def peak_memory(*command):
    """Run a program that has to succeed; its peak resident memory in bytes."""
    arguments = [sys.executable, "-S", "-E", "-c", LAUNCHER, *map(str, command)]
    return int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
