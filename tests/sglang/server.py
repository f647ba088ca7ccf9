"""SGLang's own server, with what the tests add to the backend in each of its processes."""

import runpy

import computing
import probing

computing.install()  # SGLang's processes begin by importing this file, too
probing.install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
