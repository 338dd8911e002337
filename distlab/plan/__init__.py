"""Behind `distlab plan`: which layout trains a model fastest, and where its time goes.

catalog       models and clusters, ours (*.toml) or a file of yours
formulas      unit `planning`, the learner's or the reference's
plans         all layouts that fit, and what the formulas say of each
derivation    the formula behind each number, and the lesson that teaches it
claims        "fits", "mfu >= 0.4": what a CI job may demand
played        the best layout in the simulator, beside the formulas
"""
