"""The arithmetic of forecasts: sizes of models and states, rates of machines."""
