from .lookup import Config, architectures, lookup, rows

__all__ = ["Config", "architectures", "lookup", "rows"]
