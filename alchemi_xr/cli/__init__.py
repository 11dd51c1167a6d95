"""The command ``alchemi-xr``: parse, call one public function, print."""
