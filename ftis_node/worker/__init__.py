"""The compute process: it owns the GPU and runs torch; the network process talks to it over one pipe."""
