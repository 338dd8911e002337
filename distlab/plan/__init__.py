"""Behind `distlab plan`: which layout trains a model fastest, and where its time goes.

catalog       models and clusters: ours (*.toml), or a file of your own
formulas      unit `planning`, the learner's or the reference's
plans         all layouts that fit, with their memory and time by the formulas
derivation    the formula behind each number, and the lesson that teaches it
claims        conditions that a CI job may set, such as "fits" or "mfu >= 0.4"
played        the best layout in the simulator, to compare with the formulas
"""
