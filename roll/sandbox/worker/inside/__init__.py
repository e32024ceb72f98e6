"""Code that runs inside: in the template, which has imported what programs need, and in its forks.

It imports nothing but the standard library, and none of this folder's parents.
"""
