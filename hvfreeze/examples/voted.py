"""Blocks frozen by vote: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.voted"""

import torch
from torch.nn.functional import cross_entropy

import hvfreeze
from hvfreeze.examples.digits import Digits
from hvfreeze.torchvision_shim import torchvision

EPOCHS = 6
world = hvfreeze.open_world()
torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
hvfreeze.broadcast_model(model, world)
digits = Digits(world.rank, world.size)
freezer = hvfreeze.freeze_by_vote(model, optimizer, world, steps_per_epoch=digits.steps_per_epoch, num_epochs=EPOCHS)

for epoch in range(EPOCHS):
    model.train()
    for images, labels in digits.epoch(epoch):
        freezer.reducer.begin()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        freezer.reducer.finish()
        optimizer.step()
        freezer.after_step(loss.item())
    if digits.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
world.close()
