"""Row operations on ragged tensors: torch everywhere, Warp where it is faster.

``gather`` copies rows of chosen samples, ``segment`` reduces over a pointer,
``compact`` fills and tidies buffers of fixed capacity. Warp is imported when a
kernel is asked for, and a kernel is compiled once for each width or dtype.
"""
