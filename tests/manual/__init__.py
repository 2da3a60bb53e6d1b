"""Programs that are run by hand: `make week`, `nat`, `compose-test`, `pictures`."""
