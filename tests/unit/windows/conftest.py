from tests.unit.slotted import make_info, record_of, slot_of

__all__ = ["make_info", "record_of", "slot_of"]
