"""From a trace to the cause: blame, rules and the catalogue of causes."""
