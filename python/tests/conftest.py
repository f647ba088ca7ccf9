"""For all tests: loads the CUDA driver that KVF_CUDA_LIBRARY names, if any, before kvferry looks for one.

kvferry looks once in a process, and remembers the result.
"""

import ctypes

from cuda_memory import LIBRARY

if LIBRARY:
    ctypes.CDLL(LIBRARY)
