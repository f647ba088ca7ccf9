# The extension module generated from the public headers; what it holds is typed where it is used.
from typing import Any

ffi: Any
lib: Any
