"""Shapes, costs and data flow of a model, found under fake tensors: no data, no memory."""
