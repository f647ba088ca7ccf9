"""What holds for all tests: where a driver for CUDA devices is named, it is there before kvferry looks for one.

kvferry looks once in a process, and remembers what it found.
"""

import ctypes

from cuda_memory import LIBRARY

if LIBRARY:
    ctypes.CDLL(LIBRARY)
