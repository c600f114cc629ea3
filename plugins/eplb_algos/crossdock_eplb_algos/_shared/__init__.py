"""Code used by two planners or more: counts, packing, refinement, churn, forecast. numpy only, one thread."""
