"""LSTM, GRU, RNN as scans."""
