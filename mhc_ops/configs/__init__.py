from .lookup import Config, architectures, lookup, rows, set_batch_invariant

__all__ = ["Config", "architectures", "lookup", "rows", "set_batch_invariant"]
