"""The native library: its C++ sources, the build of them, and its functions in Python.

It is a plain C-ABI library that ctypes loads, built against a vendored XLA FFI header, so that one build serves all
supported versions of Python and jaxlib (docs/design/wire-format.md). It speeds up a Python reference and adds no
meaning: the codec, the rules and the queue exist in Python too, and the same tests run on both. `abi/exports.h` is the
interface; docs/design/ring.md describes the memory, docs/design/gpu-transport.md the GPU half.
"""
