"""The relay tree: payloads cross the boundary once and go on through a balanced tree of rollout nodes.

Paper: Section 7 (relay tree)
"""
