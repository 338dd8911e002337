"""Networks for a simulated run: formulas, fabrics and measured tables.

Read `links` first. `spec` defines how you type a network.
"""
