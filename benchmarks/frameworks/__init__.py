"""Steps of training frameworks on unishard beside the frameworks' own, on the same engine and strategy:
`python -m benchmarks.frameworks`.
"""
