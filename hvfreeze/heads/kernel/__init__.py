"""A head that compares features with those of every training row: kernel ridge regression, solved by all ranks.

A linear layer can only weigh features; likeness to known rows can bend around classes that no plane divides. Sources:
Saunders, Gammerman and Vovk, "Ridge Regression Learning Algorithm in Dual Variables" (ICML 1998); the preconditioned
solution by products alone: Frangella, Tropp and Udell (SIAM J. Matrix Anal. Appl. 44, 2023).
"""
