"""Steps of unishard beside the same training written by hand and through Accelerate, on both engines:
`python -m benchmarks.peers`.
"""
