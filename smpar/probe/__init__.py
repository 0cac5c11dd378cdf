"""What machines and models really take: links, devices, layers, measured where they are."""
