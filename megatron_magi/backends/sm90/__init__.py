"""What the Hopper kernels need around them: compiler, driver, tile plans."""
