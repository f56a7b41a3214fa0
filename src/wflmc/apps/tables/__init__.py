"""From a table to private, calibrated predictions.

Estimators follow scikit-learn, and choose their settings inside ε.
"""
