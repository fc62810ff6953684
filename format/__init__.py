"""The one definition of Mosaic's bytes and names: numpy and ml_dtypes, no torch. docs/FORMAT.md is its prose."""
