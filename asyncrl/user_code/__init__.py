"""The user's own functions and how they run: rewards, environments and stages, in processes of their own.

Their types are exported by `asyncrl`, lazily: every worker imports the user's file, and must start fast.
"""
