"""Messages of migrated units: which rank gives and takes what, and the exchange of weights and gradients."""
