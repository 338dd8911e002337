"""Processes of ours, whatever they are for: their tree, and a server that forks them.

tree         find and end descendants; die with the parent; adopt orphans
fork_server  one process imports what all need, and forks the others from itself
"""
