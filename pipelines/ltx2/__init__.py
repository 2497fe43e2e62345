"""LTX-2: ``LTX2Pipeline``, video with sound."""
