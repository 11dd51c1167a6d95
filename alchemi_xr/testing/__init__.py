"""What tests of this package and of plug-ins share.

``strategies`` draws ragged data for hypothesis (an extra: ``alchemi_xr[test]``),
``reference`` has the slow loops over samples that fast code must equal.
"""
