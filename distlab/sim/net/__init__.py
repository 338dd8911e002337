"""Networks under a simulated run: formulas, fabrics and measured tables.

Read `links` first; `spec` is how a network is typed.
"""
