"""What to write in place of what people know from torch and other tools: `names` of calls and words, and `arguments` of
calls.
"""
