"""The speedrun's program of July 2026 (record 89) in PyTorch, written from its description: the reference of
preset 2026-07-17.
"""
