"""Models of which each rank has a part: what they compute together, and which part each has.

A model is cut before it is sharded: what is behind, units, plans and engines, sees an ordinary, smaller model.
"""
