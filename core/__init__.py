"""The packages of sabia; the README says what each of them holds."""
