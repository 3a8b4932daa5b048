"""The same steps of a script on several engines and strategies, measured or held to losses: `unishard compare`.

Every candidate is a run of `unishard launch` with overrides, which writes its values to a file. The run ends from
outside, after the record of the last step, so the script needs no option for it.
"""
