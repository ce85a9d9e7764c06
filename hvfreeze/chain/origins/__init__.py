"""Where models come from that torchvision has not, and weights: a file, torchvision, timm, a function of one's own."""
