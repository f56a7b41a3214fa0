"""From a table to private, calibrated predictions: scikit-learn estimators that choose their settings inside ε."""
