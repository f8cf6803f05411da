"""Integrations with other tools, one module for each. Import the module that you need; the tools are optional dependencies."""

__all__: list[str] = []
